/*
 * Leaves processes to process 1: BATCHES times EACH of them.
 *
 *     orphans BATCHES EACH
 *
 * A batch has a parent that waits for none of its children and ends. In every
 * other batch they have ended before it; in the others they live until it is
 * gone, and end all at once as children of process 1.
 */
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void leave_dead(long each)
{
	/* Not on the stack, which the child borrows. */
	static long made;
	for (; made < each; made++) {
		pid_t child = vfork();
		if (child < 0)
			die("vfork");
		if (child == 0)
			_exit(0);
	}
	_exit(0);
}

static void leave_living(long each)
{
	int held[2];
	if (pipe(held) != 0)
		die("pipe");
	for (long made = 0; made < each; made++) {
		pid_t child = fork();
		char byte;
		if (child < 0)
			die("fork");
		if (child == 0) {
			close(held[1]);
			/* Ends when the last writer does. */
			_exit(read(held[0], &byte, 1) == 0 ? 0 : 1);
		}
	}
	_exit(0);
}

int main(int count, char **words)
{
	long batches = count == 3 ? atol(words[1]) : 0;
	long each = count == 3 ? atol(words[2]) : 0;
	if (batches <= 0 || each <= 0) {
		fprintf(stderr, "usage: orphans BATCHES EACH\n");
		return 2;
	}
	for (long batch = 0; batch < batches; batch++) {
		int status = 0;
		pid_t parent = fork();
		if (parent < 0)
			die("fork");
		if (parent == 0) {
			if (batch % 2 == 0)
				leave_dead(each);
			leave_living(each);
		}
		if (waitpid(parent, &status, 0) != parent)
			die("waitpid");
		if (status != 0) {
			fprintf(stderr, "batch %ld: status %d\n", batch, status);
			return 1;
		}
	}
	printf("made %ld\n", batches * each);
	return 0;
}
