"""Programs that none of us chose, run by us and by others: what is right, and what silently wrong."""
