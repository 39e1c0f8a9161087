"""Where two runs part, and what differs between them."""
