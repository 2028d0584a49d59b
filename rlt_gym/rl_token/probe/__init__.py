"""Is an RL token any good: what can be read from it, what shape its values have, and the page that shows both."""
