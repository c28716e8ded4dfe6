"""What each command of `amoeba` does."""
