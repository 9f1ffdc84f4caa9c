#pragma once

// Kernel of a loaded module.
struct Kernel {
    void (*run)(void* const* arguments);
    bool waits;
    unsigned arguments;
};

// Runs all blocks of a launch. Returns false if lanes left a barrier to others.
bool run_kernel(const Kernel& kernel, const unsigned grid[3], unsigned lanes, void* const* arguments);
