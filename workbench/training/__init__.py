"""What every training run needs: state on disk, Ctrl-C at a safe moment, schedules."""
