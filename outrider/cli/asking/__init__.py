"""Commands that ask a served model: `outrider generate` and `outrider chat`."""
