"""What memshare's processes must agree on: versions, errors, packed ids, paths, sockets."""
