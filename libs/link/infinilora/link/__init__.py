"""The activation link: frames, rings, shm and tcp back-ends, and how two processes open one."""
