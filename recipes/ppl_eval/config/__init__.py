"""What a person sets and where files are kept: config keys, components by name, device, dtype and seed."""
