"""Where a step's time goes, and how much each part could give at most. See README.md for the way through."""
