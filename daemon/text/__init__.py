"""Text on its way in and out: tokens, chat templates, incremental text and stop strings. No torch."""
