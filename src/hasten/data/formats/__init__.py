"""The sources: arrays, tokens, tables, TFRecord, images, WebDataset shards. One public function makes each."""
