"""The whole recipe: what is built, checked and carried over for the user."""
