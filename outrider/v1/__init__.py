"""Generated from proto/outrider/v1 by `make proto`; never edited by hand."""
