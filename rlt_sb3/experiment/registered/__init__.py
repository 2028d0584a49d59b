"""What this package registers: one file per algorithm, each imported by ``rlt_sb3.experiment.algorithms``."""
