"""LIBERO as a Gymnasium vector environment over subprocess workers."""
