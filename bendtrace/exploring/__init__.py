"""Finding inputs that take the sides of branches that no call has taken."""
