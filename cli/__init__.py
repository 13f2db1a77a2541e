"""The command line, installed as the package `mpfs_cli`: the only reader of the environment and the terminal."""
