"""The drafters that ship with the package: one folder each, holding model.safetensors, config.json and README.md."""
