"""Commands that show what running services do: `outrider top` and `outrider explain`."""
