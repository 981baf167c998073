"""Laws: what every algorithm keeps to, whatever it computes. The tests run them on those of the package."""
