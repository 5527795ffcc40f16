"""Every checkpoint form, read lazily and unpickled never, under one set of names."""
