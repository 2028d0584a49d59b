"""Small helpers shared by the parts of `rlt_gym`."""
