"""Programs that none of us chose, run by us and by others: right, refused, or silently wrong."""
