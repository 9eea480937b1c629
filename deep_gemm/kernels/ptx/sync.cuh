// Roles, clusters, dependent launches and addresses; each function is one PTX instruction.
#pragma once

#include "ptx/types.cuh"

DEVICE uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Hides where a value came from, so that the compiler keeps it in a register instead of computing
// it again inside a loop (measured: 4 % to 11 % of the main loop).
DEVICE void pin(uint32_t& value) { asm volatile("" : "+r"(value)); }

// True in one lane of the (converged) warp. The compiler knows that it is one, and issues TMA without
// the loop over active lanes that it needs after an ordinary comparison of the lane index.
DEVICE bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n"
        "    .reg .pred elected;\n"
        "    elect.sync _|elected, 0xFFFFFFFF;\n"
        "    selp.u32 %0, 1, 0, elected;\n"
        "}"
        : "=r"(elected));
    return elected != 0;
}

// PTX ISA, "Miscellaneous Instructions: setmaxnreg".
template <int registers>
DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster".
DEVICE void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol". Both are
// no-ops when the launch does not ask for programmatic dependent launch.
DEVICE void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

DEVICE void griddepcontrol_launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
