// Blocks run one after the other, the lanes of a block as fibers that change at barriers, in rising or falling order.
#include "lanes.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <string>
#include <vector>
#include "software.h"

struct SoftwareIndex { unsigned x, y, z; };
extern "C" SoftwareIndex blockIdx, threadIdx;
SoftwareIndex blockIdx, threadIdx;

enum { MAX_LANES = 1024, STACK_BYTES = 256 << 10 };
static const Kernel* current;
static void* const* current_arguments;

#if defined(__x86_64__)
// Saves the registers that a function must keep on the stack of a fiber, and continues another one.
extern "C" void software_switch(void** from, void* to);
asm(R"(
.text
.globl software_switch
.hidden software_switch
.type software_switch, @function
software_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size software_switch, .-software_switch
)");
struct Fiber {
    void* stack_pointer;
    void prepare(char* stack, void (*start)()) {
        void** top = (void**)(stack + STACK_BYTES);
        *--top = nullptr;  // Aligns the stack for a function at its start.
        *--top = nullptr;
        *--top = (void*)start;
        for (int k = 0; k < 6; k++) { *--top = nullptr; }
        stack_pointer = top;
    }
};
static void change(Fiber& from, Fiber& to) { software_switch(&from.stack_pointer, to.stack_pointer); }
#else
#include <ucontext.h>
struct Fiber {
    ucontext_t context;
    void prepare(char* stack, void (*start)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = stack;
        context.uc_stack.ss_size = STACK_BYTES;
        context.uc_link = nullptr;
        makecontext(&context, start, 0);
    }
};
static void change(Fiber& from, Fiber& to) { swapcontext(&from.context, &to.context); }
#endif

static Fiber lanes[MAX_LANES], home;
static bool is_done[MAX_LANES];
static unsigned current_lane;

static void lane_main() {
    current->run(current_arguments);
    is_done[current_lane] = true;
    change(lanes[current_lane], home);
}

extern "C" void software_barrier() {
    unsigned own = current_lane;
    change(lanes[own], home);
    threadIdx = {own, 0, 0};
}

static bool run_block(unsigned count, bool falling, char* stacks) {
    for (unsigned k = 0; k < count; k++) {
        lanes[k].prepare(stacks + (size_t)k * STACK_BYTES, lane_main);
        is_done[k] = false;
    }
    for (unsigned left = count; left > 0;) {
        unsigned ended = 0;
        for (unsigned k = 0; k < count; k++) {
            current_lane = falling ? count - 1 - k : k;
            if (is_done[current_lane]) { continue; }
            threadIdx = {current_lane, 0, 0};
            change(home, lanes[current_lane]);
            ended += is_done[current_lane];
        }
        if (ended != 0 && ended != left) { return false; }
        left -= ended;
    }
    return true;
}

bool run_kernel(const Kernel& kernel, const unsigned grid[3], unsigned count, void* const* arguments) {
    static char* stacks = (char*)mmap(nullptr, (size_t)MAX_LANES * STACK_BYTES, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const bool falling = software_setting("SOFTWARE_CUDA_LANES", "rising") == "falling";
    current = &kernel;
    current_arguments = arguments;
    for (unsigned z = 0; z < grid[2]; z++) {
        for (unsigned y = 0; y < grid[1]; y++) {
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                if (kernel.waits) {
                    if (!run_block(count, falling, stacks)) { return false; }
                    continue;
                }
                for (unsigned k = 0; k < count; k++) {
                    threadIdx = {falling ? count - 1 - k : k, 0, 0};
                    kernel.run(arguments);
                }
            }
        }
    }
    return true;
}
