"""Look into a folder of ours, and check whether its files match their checksums; nothing is changed."""
