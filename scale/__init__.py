"""Several pagedd engines, on several machines, behind one address: replicas of Ray Serve. See docs/scale-out.md.

Ray places, routes, heals and scales; each replica owns one daemon and stays a program of one machine. Only
`ray_serve.py` knows Ray, which is an extra (`pip install 'pagedd[ray]'`).
"""
