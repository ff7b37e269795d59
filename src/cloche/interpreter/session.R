# A live session of R: `Rscript --vanilla session.R ANSWERS`, with the link as standard input.
#
# Theory of operation: a request is a line `<id> <blocks>`, then for each block a line with its length in bytes, and the
# bytes: the code, the folder to go to (or nothing), and names and values of variables for this run alone. Answers are
# the frames of the other drivers: four bytes of length, most significant first, and a JSON object. They go through a
# program that copies them, since R writes to no number of a descriptor. All of this is in an environment of its own, so
# the global one is the cell's.

local({
  link <- file("stdin", "rb")
  answers <- pipe(paste0("trap '' INT; exec cat >&", commandArgs(TRUE)[[1]]), "wb") # an interrupt is meant for R
  most <- 60000
  before <- list() # variables of the last run alone, as they were

  quoted <- function(text) {
    text <- substr(enc2utf8(paste(text, collapse = "\n")), 1, most)
    for (pair in list(c("\\", "\\\\"), c("\"", "\\\""), c("\n", "\\n"), c("\r", "\\r"), c("\t", "\\t"))) {
      text <- gsub(pair[[1]], pair[[2]], text, fixed = TRUE)
    }
    paste0("\"", gsub("[[:cntrl:]]", "", text), "\"")
  }

  send <- function(...) {
    body <- charToRaw(enc2utf8(paste0(...)))
    writeBin(length(body), answers, size = 4, endian = "big")
    writeBin(body, answers)
    flush(answers)
  }

  receive <- function() {
    head <- readLines(link, 1)
    if (length(head) == 0) quit("no", 0, FALSE)
    numbers <- as.numeric(strsplit(head, " ", fixed = TRUE)[[1]])
    blocks <- vapply(seq_len(numbers[[2]]), function(index) {
      size <- as.integer(readLines(link, 1))
      text <- if (size > 0) readChar(link, size, useBytes = TRUE) else ""
      Encoding(text) <- "UTF-8"
      text
    }, "")
    list(id = numbers[[1]], code = blocks[[1]], folder = blocks[[2]], variables = blocks[-(1:2)])
  }

  assign_all <- function(values) {
    for (name in names(values)) {
      if (is.na(values[[name]])) Sys.unsetenv(name) else do.call(Sys.setenv, values[name])
    }
  }

  surround <- function(request) {
    assign_all(before)
    places <- seq_along(request$variables)
    names <- request$variables[places %% 2 == 1]
    before <<- if (length(names) > 0) as.list(Sys.getenv(names, unset = NA, names = TRUE)) else list()
    assign_all(stats::setNames(as.list(request$variables[places %% 2 == 0]), names))
    if (nzchar(request$folder)) setwd(request$folder)
  }

  evaluate <- function(request) {
    surround(request)
    value <- list(visible = FALSE)
    for (expression in parse(text = request$code, keep.source = FALSE)) {
      value <- withVisible(eval(expression, globalenv()))
    }
    if (!value$visible || is.null(value$value)) return("\"exit_code\": 0")
    text <- quoted(utils::capture.output(print(value$value)))
    paste0("\"exit_code\": 0, \"value_repr\": ", text, ", \"data\": {\"text/plain\": ", text, "}")
  }

  failed <- function(name, message, trace) {
    paste0(
      "\"exit_code\": 1, \"error\": {\"name\": ", quoted(name), ", \"message\": ", quoted(message),
      ", \"traceback\": ", quoted(trace), "}"
    )
  }

  send("{\"op\": \"ready\", \"runtime\": ", quoted(R.version.string), "}")
  repeat {
    request <- receive()
    end <- if (request$id == 0) "\"exit_code\": 0" else tryCatch(
      withCallingHandlers(
        evaluate(request),
        warning = function(condition) {
          message("Warning message:\n", conditionMessage(condition))
          invokeRestart("muffleWarning")
        }
      ),
      error = function(condition) {
        trace <- sub("\n$", "", paste0(utils::capture.output(print(condition)), collapse = "\n"))
        failed("ERROR", conditionMessage(condition), trace)
      },
      interrupt = function(condition) failed("KeyboardInterrupt", "the cell was interrupted", "")
    )
    flush(stdout())
    send("{\"op\": \"done\", \"id\": ", format(request$id, scientific = FALSE), ", ", end, "}")
  }
})
