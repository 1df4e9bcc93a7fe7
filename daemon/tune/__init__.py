"""`pagedd tune`: the advice, tried out in order on the user's own model and load."""
