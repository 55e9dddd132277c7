"""The manager: sessions, reference counts, share decisions and the services around them."""
