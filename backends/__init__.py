"""Where cache rows live: a backend owns storage and the addresses of key and value rows, and knows no model."""
