# lib.mk – the C library: `make lib` and `make install-lib`. It is made of the same files as the extension of Python, by
# the same rules, but for what binds them to Python.

include csrc/rules.mk

comma := ,
PREFIX ?= /usr/local
OBJCOPY ?= objcopy
LIBDIR ?= $(PREFIX)/lib
BUILD := build/lib$(if $(SANITIZE),-$(firstword $(subst $(comma), ,$(SANITIZE))))$(if $(DEBUG),-debug)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
MAJOR := $(firstword $(subst ., ,$(VERSION)))
MACHINE := $(patsubst arm64,aarch64,$(patsubst amd64,x86_64,$(firstword $(subst -, ,$(shell $(CC) -dumpmachine)))))
DARWIN := $(findstring darwin,$(shell $(CC) -dumpmachine))

# The words of flags, if the compiler knows them, and its assembler the instruction.
understood = $(shell printf 'void f(void) { __asm__("%s"); }' '$(2)' | $(CC) $(1) -Werror -x c -c -o /dev/null - \
    2>/dev/null && echo '$(1)')

OPENMP := $(call understood,-fopenmp)
ALIGNED := $(call understood,$(FLAGS_ALIGNED))
NO_PRE := $(call understood,$(FLAGS_NO_PRE))
FLAGS_baseline := $(if $(filter aarch64,$(MACHINE)),$(call understood,$(FLAGS_ARM)))
LEVELS := baseline $(foreach level,$(LEVELS_$(MACHINE)),\
    $(if $(call understood,$(FLAGS_$(level)),$(INSTRUCTION_$(level))),$(level)))
WRITTEN_OUT := baseline $(LEVELS_aarch64) # levels whose loops are written out

# Builds for tests emulate products of bfloat16 on other processors, as those of setup.py do.
EMULATE := $(if $(DEBUG)$(SANITIZE),-DAM_EMULATE)
TOPICS_baseline += $(if $(EMULATE),$(TOPICS_neonbf16))

OPTIMIZE := $(if $(DEBUG),-O0 -g,$(if $(SANITIZE),-O1 -g,-O3 -DNDEBUG))
OPTIMIZE += $(if $(SANITIZE),-fsanitize=$(SANITIZE) -fno-sanitize-recover=all -fno-omit-frame-pointer)
FLAGS := $(CFLAGS_CORE) $(OPTIMIZE) -fPIC -Icsrc -Iinclude -DAM_VERSION='"$(VERSION)"' $(EMULATE) \
    $(foreach level,$(LEVELS),-DAM_HAVE_$(shell echo $(level) | tr a-z A-Z)) $(CFLAGS)

KERNELS := $(shell find csrc -path '*/kernels/*.c')
OTHERS := $(shell find csrc/core csrc/conv csrc/tokens -name '*.c' -not -path '*/kernels/*' -not -path '*/bind/*') \
    $(wildcard csrc/bind/*.c csrc/bind/c/*.c)
OBJECTS := $(OTHERS:%.c=$(BUILD)/%.o) \
    $(foreach level,$(LEVELS),$(foreach topic,$(TOPICS_$(level)),$(BUILD)/$(level)/$(topic).o))

SHARED := $(BUILD)/libattnmask.$(if $(DARWIN),$(MAJOR).dylib,so.$(VERSION))
NAME := libattnmask.$(if $(DARWIN),$(MAJOR).dylib,so.$(MAJOR))
LINK := $(BUILD)/libattnmask.$(if $(DARWIN),dylib,so)
STATIC := $(BUILD)/libattnmask.a

.PHONY: all install
.DEFAULT_GOAL := all
all: $(SHARED) $(STATIC)

$(BUILD)/%.o: %.c csrc/rules.mk csrc/lib.mk
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(OPENMP) -MMD -MP -c $< -o $@

# A topic at a level: its file with the flags of that.
define kernel
$(BUILD)/$(1)/$(2).o: $(filter %/$(2).c,$(KERNELS)) csrc/rules.mk csrc/lib.mk
	@mkdir -p $$(@D)
	$$(CC) $$(FLAGS) $$(CFLAGS_KERNELS) $(if $(filter-out arrays,$(2)),$(NO_PRE) \
	    $(if $(DEBUG)$(SANITIZE),,$(if $(filter $(1),$(WRITTEN_OUT)),-O2))) $(FLAGS_baseline) $(FLAGS_$(1)) $(ALIGNED) \
	    -DLEVEL=$(1) $(if $(ALIGNED),$(if $(NO_PRE),$(FLAGS_OF_$(1)/$(2)))) -MMD -MP -c $$< -o $$@
endef
$(foreach level,$(LEVELS),$(foreach topic,$(TOPICS_$(level)),$(eval $(call kernel,$(level),$(topic)))))

# It stays where it was loaded once: forked children call it.
$(SHARED): $(OBJECTS)
	$(CC) -shared $(OPTIMIZE) $(LDFLAGS) $(if $(DEBUG)$(SANITIZE)$(DARWIN),,-s) $(if $(DARWIN),-install_name @rpath/$(NAME),-Wl$(comma)-soname$(comma)$(NAME) \
	    -Wl$(comma)-z$(comma)nodelete) -o $@ $(OBJECTS) -pthread $(OPENMP) -lm
	@ln -sf $(@F) $(BUILD)/$(NAME)
	@ln -sf $(NAME) $(LINK)

# One object, in which all names but those of the header are its own.
$(STATIC): $(OBJECTS)
	@rm -f $@
	$(LD) -r -o $(BUILD)/attnmask.o $(OBJECTS)
	$(if $(DARWIN),,$(OBJCOPY) --localize-hidden $(BUILD)/attnmask.o)
	$(AR) rcs $@ $(BUILD)/attnmask.o

install: all
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(LIBDIR)/cmake/attnmask
	install -m 644 include/attnmask.h $(DESTDIR)$(PREFIX)/include
	install -m 755 $(SHARED) $(DESTDIR)$(LIBDIR)
	ln -sf $(notdir $(SHARED)) $(DESTDIR)$(LIBDIR)/$(NAME)
	ln -sf $(NAME) $(DESTDIR)$(LIBDIR)/$(notdir $(LINK))
	install -m 644 $(STATIC) $(DESTDIR)$(LIBDIR)
	sed 's/@VERSION@/$(VERSION)/; s/@OPENMP@/$(OPENMP)/' csrc/bind/c/attnmask.pc.in \
	    > $(DESTDIR)$(LIBDIR)/pkgconfig/attnmask.pc
	sed 's/@NAME@/$(NAME)/; s/@OPENMP@/$(OPENMP)/' csrc/bind/c/attnmask-config.cmake.in \
	    > $(DESTDIR)$(LIBDIR)/cmake/attnmask/attnmask-config.cmake

-include $(OBJECTS:.o=.d)
