"""What only a run needs: configuration, algorithms, phases, checkpoints, report. It may import both packages."""
