"""Drawing a LIBERO scene: plain MuJoCo, and the shortcuts that make it quick. Python 3.8."""
