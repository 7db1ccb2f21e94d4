/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the parts of the stand-in nvidia.ko share. Own code, test only: nothing
 * here drives hardware, and probe refuses devices without the lab's magic.
 */
#ifndef STANDIN_H
#define STANDIN_H

#include <linux/atomic.h>
#include <linux/cdev.h>
#include <linux/kthread.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/types.h>
#include <linux/wait.h>

#define STANDIN_RELEASE "550.163.01"

/*
 * BAR0. The lab's registers have the same names and numbers in
 * tests/synthetic-gpu/src/registers.rs; a test there compares the two files.
 * Offsets of LAB_* are from LAB_BASE; all are 32 bits.
 */
#define PMC_BOOT_0       0x00
#define LAB_BASE         0x3ff000
#define LAB_MAGIC_VALUE  0x464c4142
#define LAB_MAGIC        0x00 /* RO: LAB_MAGIC_VALUE */
#define LAB_ATTACH_MS    0x04 /* RW: milliseconds of an attach */
#define LAB_FAIL_CODE    0x08 /* RW: 0, or stage << 16 | status */
#define LAB_HANG         0x0c /* RW: 1 = the attach never ends */
#define LAB_ATTACH_COUNT 0x10 /* RW: attaches begun, added to by the driver */
#define LAB_INDEX        0x14 /* RO: position on the server's command line */
#define LAB_DOORBELL     0x18 /* WO: raises that MSI-X vector */

#define NV_MAJOR          195
#define NV_MINOR_CTL      255
#define NV_MAX_GPUS       32

/* The one ioctl of the real ABI that is modelled. */
struct nv_wait_open_complete {
	__s32 rc;
	__u32 adapter_status;
};
#define NV_ESC_WAIT_OPEN_COMPLETE _IOWR('F', 218, struct nv_wait_open_complete)

/* One GPU that was probed. */
struct gpu {
	struct list_head node;       /* in gpu_list, under gpu_list_lock */
	struct pci_dev *pdev;
	void __iomem *bar0;
	const char *model;
	unsigned int minor;
	char uuid[41];
	bool uuid_known;             /* as the real one: after the first attach */

	/*
	 * The device's own lock, held while it attaches and while it shuts
	 * down. Guards initialised and usage.
	 */
	struct mutex lock;
	bool initialised;
	unsigned int usage;          /* opens that succeeded and are not closed */

	struct kthread_worker *open_queue;
	int vectors;                 /* MSI-X vectors in use while initialised */
	atomic_t interrupts;

	/* Open files, and what the queue still has to close. */
	unsigned int files;          /* under gpu_list_lock */
	wait_queue_head_t gone_wait;
	bool gone;                   /* the device is being removed: stop waiting */

	struct proc_dir_entry *proc;
};

extern struct list_head gpu_list;
extern struct mutex gpu_list_lock;

static inline u32 lab_read(struct gpu *gpu, u32 reg)
{
	return readl(gpu->bar0 + LAB_BASE + reg);
}

static inline void lab_write(struct gpu *gpu, u32 reg, u32 value)
{
	writel(value, gpu->bar0 + LAB_BASE + reg);
}

/* nvidia_main.c: what the module parameters or the registers say. */
u32 standin_attach_ms_of(struct gpu *gpu);
u32 standin_fail_of(struct gpu *gpu);
bool standin_hang_of(struct gpu *gpu);
bool standin_signs_of(struct gpu *gpu);
extern char *standin_firmware;
extern bool standin_hang_holds_lock;
extern int standin_lock_permille;
extern int NVreg_EnableNonblockingOpen;
extern int NVreg_ModifyDeviceFiles;
extern int NVreg_DeviceFileUID;
extern int NVreg_DeviceFileGID;
extern int NVreg_DeviceFileMode;
extern int NVreg_NvLinkDisable;
extern int NVreg_EnableGpuFirmware;
extern int NVreg_OpenRmEnableUnsupportedGpus;
extern char *NVreg_RegistryDwords;

/* nvidia_attach.c */
int gpu_get(struct gpu *gpu, u32 *adapter_status);
void gpu_put(struct gpu *gpu);

/* nvidia_open.c */
int nvidia_chrdev_init(void);
void nvidia_chrdev_exit(void);
void gpu_wait_unused(struct gpu *gpu);

/* nvidia_proc.c */
int nvidia_proc_init(void);
void nvidia_proc_exit(void);
int nvidia_proc_add(struct gpu *gpu);
void nvidia_proc_remove(struct gpu *gpu);

/* nvidia_fabric.c */
int nvidia_fabric_init(void);
void nvidia_fabric_exit(void);
bool nvidia_fabric_present(void);

#endif
