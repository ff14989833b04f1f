"""The sources, one maker each: arrays, tokens, tables, TFRecord, pictures, tar shards."""
