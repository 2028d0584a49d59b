"""The rlt command. It may import both packages."""
