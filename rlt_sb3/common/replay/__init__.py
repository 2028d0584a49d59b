"""The replay buffer of chunks: storage, index of rows, open episodes, rows from files, rows of interventions."""
