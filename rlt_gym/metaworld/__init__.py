"""Meta-World as a Gymnasium vector environment over subprocess workers; needs the extra ``metaworld``."""
