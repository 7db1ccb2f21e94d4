/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libcuda.so.1 beside the stand-in driver: as much as the CUDA
 * program of tests/gpu-test calls. Like the real one it sees the GPUs whose
 * nodes it can open, gives none without /dev/nvidiactl and /dev/nvidia-uvm, and
 * keeps what it opened. "Device memory" is the host's, and the only kernel it
 * knows is the addition.
 */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101, INVALID_PTX = 218, MOST = 16 };

#define EXPORT __attribute__((visibility("default")))

typedef int result;
typedef unsigned long long address;

static int number;
static char places[MOST][16];
static int token;

EXPORT result cuInit(unsigned int flags)
{
	char path[32];
	int minor, node;

	if (flags)
		return INVALID_VALUE;
	if (open("/dev/nvidiactl", O_RDWR) < 0 || open("/dev/nvidia-uvm", O_RDWR) < 0)
		return NO_DEVICE;
	for (minor = 0; minor < MOST; minor++) {
		ssize_t length;

		snprintf(path, sizeof(path), "/dev/nvidia%d", minor);
		node = open(path, O_RDWR);
		if (node < 0)
			continue;
		/* The stand-in driver answers with the GPU's PCI address. */
		length = read(node, places[number], sizeof(places[0]) - 1);
		places[number][length > 0 ? length : 0] = 0;
		places[number][strcspn(places[number], " \n")] = 0;
		number++;
	}
	return number ? OK : NO_DEVICE;
}

EXPORT result cuDriverGetVersion(int *version)
{
	*version = 13000;
	return OK;
}

EXPORT result cuDeviceGetCount(int *count)
{
	*count = number;
	return number ? OK : NOT_INITIALIZED;
}

EXPORT result cuDeviceGet(int *device, int ordinal)
{
	*device = ordinal;
	return ordinal >= 0 && ordinal < number ? OK : INVALID_DEVICE;
}

EXPORT result cuDeviceGetName(char *name, int length, int device)
{
	snprintf(name, length, "stand-in");
	return device < number ? OK : INVALID_DEVICE;
}

EXPORT result cuDeviceGetPCIBusId(char *text, int length, int device)
{
	if (device >= number)
		return INVALID_DEVICE;
	snprintf(text, length, "%s", places[device]);
	return OK;
}

EXPORT result cuDevicePrimaryCtxRetain(void **context, int device)
{
	*context = &token;
	return device < number ? OK : INVALID_DEVICE;
}

EXPORT result cuDevicePrimaryCtxRelease_v2(int device)
{
	return device < number ? OK : INVALID_DEVICE;
}

EXPORT result cuCtxSetCurrent(void *context)
{
	return context == &token ? OK : INVALID_VALUE;
}

EXPORT result cuCtxSynchronize(void)
{
	return OK;
}

EXPORT result cuModuleLoadData(void **module, const void *image)
{
	*module = &token;
	return strstr(image, ".visible .entry add(") ? OK : INVALID_PTX;
}

EXPORT result cuModuleGetFunction(void **function, void *module, const char *name)
{
	*function = &token;
	return module == &token && !strcmp(name, "add") ? OK : INVALID_VALUE;
}

EXPORT result cuMemAlloc_v2(address *place, size_t bytes)
{
	*place = (address)(uintptr_t)malloc(bytes);
	return *place ? OK : INVALID_VALUE;
}

EXPORT result cuMemFree_v2(address place)
{
	free((void *)(uintptr_t)place);
	return OK;
}

EXPORT result cuMemcpyHtoD_v2(address to, const void *from, size_t bytes)
{
	memcpy((void *)(uintptr_t)to, from, bytes);
	return OK;
}

EXPORT result cuMemcpyDtoH_v2(void *to, address from, size_t bytes)
{
	memcpy(to, (void *)(uintptr_t)from, bytes);
	return OK;
}

EXPORT result cuLaunchKernel(void *function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
			     unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared,
			     void *stream, void **parameters, void **extra)
{
	uint32_t *to, *left, *right, count, at;

	if (function != &token || shared || stream || extra || grid_y * grid_z * block_y * block_z != 1)
		return INVALID_VALUE;
	to = (uint32_t *)(uintptr_t)*(address *)parameters[0];
	left = (uint32_t *)(uintptr_t)*(address *)parameters[1];
	right = (uint32_t *)(uintptr_t)*(address *)parameters[2];
	count = *(uint32_t *)parameters[3];
	for (at = 0; at < count && at < grid_x * block_x; at++)
		to[at] = left[at] + right[at];
	return OK;
}

EXPORT result cuGetErrorName(result code, const char **name)
{
	*name = code == NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR";
	return OK;
}
