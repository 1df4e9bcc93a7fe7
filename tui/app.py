"""The `pagetop` command: says where to look while the live screen is still to come."""


def main() -> int:
    """Entry point of the console script; the exit status."""
    print("The live screen comes next; `pagectl ps` lists the requests and `pagectl blocks` draws the KV pool.")
    return 0
