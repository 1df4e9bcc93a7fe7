"""A daemon under random clients and faults: what has to hold while it lasts and after it."""
