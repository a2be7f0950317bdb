#include "bind.h"

NB_MODULE(_native, m) {
  m.doc() = "Flash reader, slot updates and CPU kernels. Use workbench.flash, workbench.dram and workbench.kernels.";
  wb::bind_reader(m);
  wb::bind_slots(m);
  wb::bind_kernels(m);
  wb::bind_coactivation(m);
}
