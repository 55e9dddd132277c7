"""A vLLM server under load: stock, and with memshare."""
