"""Tools for stored data: inspection, conversion to faster formats, and the measurements behind them."""
