"""What every process does alike: settings, logs, metrics, serving, stopping, starting others."""
