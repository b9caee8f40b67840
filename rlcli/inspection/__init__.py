"""What is in a folder of ours, and whether its files match their checksums; nothing is changed."""
