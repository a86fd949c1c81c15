@echo off
rem For a double click on Windows: open the page in the browser.  The first time, and after an installation that has
rem not finished, install.py makes the environment; one of your own is used as it is.
cd /d "%~dp0.."
if not exist ".venv\Scripts\python.exe" goto install
if exist ".venv\install_finished.txt" goto start
if not exist ".venv\made_by_install.txt" goto start
:install
where py >nul 2>nul
if errorlevel 1 (python install.py) else (py -3 install.py)
if errorlevel 1 goto failed
:start
".venv\Scripts\python.exe" -X utf8 -m library web --open_browser %*
if not errorlevel 1 exit /b 0
:failed
pause
exit /b 1
