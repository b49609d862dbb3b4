from evaluate import token_losses  # noqa: F401
