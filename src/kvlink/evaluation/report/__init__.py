"""One page from results of `kvlink evaluate`: figures, tables, and rows on which two methods differ most."""
