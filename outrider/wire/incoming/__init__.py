"""Messages from other processes: kept as bytes until their sender is known, bounded, then parsed."""
