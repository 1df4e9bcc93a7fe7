"""Bytes from strangers, for everything that reads them: what each reader may raise, and where to begin."""
