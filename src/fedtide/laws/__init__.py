"""Laws that every algorithm keeps, whatever it computes; `fedtide check` and the tests run them."""
