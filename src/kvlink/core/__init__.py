"""Values and maths: what everything above agrees on. Knows no files, clocks, models or networks."""
